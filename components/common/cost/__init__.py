"""Cost of the stages: measured time and energy, prices, budgets."""
