"""An et al. 2020, repulsive attention."""
