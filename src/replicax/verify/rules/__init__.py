"""The classic errors of hand-written data-parallel code, found by reading it.

A file is read as a syntax tree and *walked* with abstract values: `machine` goes through statements
and expressions, calls functions of the same file as Python would, and knows of each value what the
rules ask (is it a gradient, was it reduced, which loss is it of). Nothing of the file is executed
and nothing it imports is loaded. Where something cannot be seen, no rule speaks: a false alarm
costs more trust than a miss.
"""
