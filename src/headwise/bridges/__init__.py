"""Bridges to optional libraries; each imports the library it is named after, and only what says so imports it."""
