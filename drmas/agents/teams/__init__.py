"""The teams that ship with drmas, one file each."""
