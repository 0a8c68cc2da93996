"""The manager: one page to watch, switch and tune engines, and a gateway that loads the model a request names."""
