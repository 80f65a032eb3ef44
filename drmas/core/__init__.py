"""Pure mathematics of the method: no distributed, no I/O, no clock, no global random state."""
