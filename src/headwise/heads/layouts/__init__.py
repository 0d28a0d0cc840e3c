"""Layouts: rules that read where the heads of an attention are from its modules and parameters."""
