"""Parts of `hsx demo`: tiny models, a server, requests, and the reference.

The reference is transformers in float32 with the same weights, so differences are the server's. A
row of bfloat16 states may differ by 4 % of the norm and an element by 16 % of the row's root mean
square. Measured are 2 % and 8 % for transformers' own bfloat16, and the closest different rows of
one layer are 9 % apart. Quantised targets have twice the tolerance, because rounding decides
which int8 number an element becomes. Deep layers have more: rounding grows with the square root
of the depth. Routers of the tiny MiniMax-M2 have wide margins, because rounding would decide
between experts that score alike.
"""


class DemoError(RuntimeError):
    """The demo cannot run, or has failed. The message has the reason and the remedy."""
