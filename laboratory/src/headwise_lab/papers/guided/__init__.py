"""Wang et al. 2021, role-guided masks."""
