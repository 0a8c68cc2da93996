"""`overspill tune`: the plan's candidates measured in short runs, and the best kept as the model's settings."""
