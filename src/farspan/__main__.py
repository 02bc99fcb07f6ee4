"""`python -m farspan`, which is also how a launcher starts it: torchrun --nproc-per-node=2 -m farspan train ..."""

from farspan.cli import main

main()
