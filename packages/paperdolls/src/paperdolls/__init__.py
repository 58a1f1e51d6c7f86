"""The paper-doll world: an abstract universe with exact ground truth, to train and measure everything offline.

Dolls are flat mannequins. "Nudity" is a doll without a garment, "violence" is a red splash or a blade in use.
"""
