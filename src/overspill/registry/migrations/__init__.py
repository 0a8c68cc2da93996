"""Alembic migrations of the registry's tables, and how they run."""
