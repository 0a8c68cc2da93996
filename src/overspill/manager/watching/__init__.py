"""What the machine and its engines do, second by second."""
