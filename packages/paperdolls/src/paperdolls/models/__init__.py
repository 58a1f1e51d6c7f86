"""The base models of the paper-doll world: how they are built, trained and distilled."""
