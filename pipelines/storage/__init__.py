"""What a shared folder promises, probed from two sides: `tuneline storage probe`.

Two processes, on one host or on two, go through the same steps in a folder of their own below the path. They meet and swap what they
measured through files there; each step holds what one of them did against what the other one saw.
"""
