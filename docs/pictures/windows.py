"""Windows, with and without `causal`."""

from grid import draw, weights

draw(("window=(2, 0)", weights(7, 7, window=(2, 0))),
     ("window=(1, 2)", weights(7, 7, window=(1, 2))),
     ("window=(None, 1)", weights(7, 7, window=(None, 1))))
