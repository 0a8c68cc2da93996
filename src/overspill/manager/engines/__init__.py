"""Engines: each watched and brought to the state that is wanted, and all of them kept within the memory."""
