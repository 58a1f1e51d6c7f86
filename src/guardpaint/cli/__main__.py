"""python -m guardpaint.cli"""

from guardpaint.cli.main import main

main()
