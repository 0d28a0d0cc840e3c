"""Self-attentive sentence embedding."""
