"""`python -m clockwright.cli`: the command without its script, as `up` starts its workers."""

from clockwright.cli.main import main

main()
