"""Vortex: sixty flows that models proposed, a search for more, routing by channels, and how all of
them answer.

flows       all flows judged: accuracy in stages, decode speed
search      random flows, then children of the best
topk        exact and approximate top-k of scores
channels    flows that route by some channels only
proposed/   the sixty, in three files
"""
