"""The method's claim, tried: tiny teams trained with each estimator, and one report."""
