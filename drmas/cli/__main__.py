"""`python -m drmas.cli`, so that `torchrun -m drmas.cli train RECIPE` works."""

from drmas.cli.main import main

main()
