"""Alembic's folder: how migrations run, and the migrations."""
