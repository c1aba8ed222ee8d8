"""`python -m segue` is the `segue` command."""

from segue.cli.main import main

main()
