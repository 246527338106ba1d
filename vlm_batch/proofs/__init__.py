"""Proofs of shapes: which calls give the same bits, for answers that can be reproduced.

``bits`` runs made-up rows and products, and compares what they give. ``classes`` chooses among numbers of rows that
agree. ``proving`` makes shapes of that, and ``shared`` proves calls that prompts or pictures share. ``device`` is what a
proof holds for; ``store.proofs`` keeps proofs in files. ``played`` runs whole requests.
"""
