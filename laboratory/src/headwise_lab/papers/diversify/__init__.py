"""Li et al. 2021, disagreement and routing."""
