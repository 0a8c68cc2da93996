"""systemd units that serve models: their contents and their installation."""
