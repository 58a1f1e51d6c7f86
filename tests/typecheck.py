"""The runtime type checker of the tests: whole numbers are welcome where a float is asked for."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
