"""Where tasks come from and how answers are graded."""
