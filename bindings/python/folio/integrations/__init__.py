"""Folio inside other people's engines: one module for each, named after it and importing it."""
