from farspan.train.draws import draw, levels

__all__ = ["draw", "levels"]
