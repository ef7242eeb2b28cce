"""``python -m kvdata`` is the ``kvdata`` command."""

from kvdata.cli import main

main()
