"""The models the laboratory trains, and the baselines they have to beat."""
