"""Many runs at once, on this machine or on others."""
