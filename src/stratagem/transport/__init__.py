"""Requests and answers between the tasks of a job; imports no JAX.

Read `message` (what travels), `outgoing` and `incoming` (the two ends of a request, pure), `hub`
(one thread's connections), then what carries the frames: `sockets` with `curve` and `arena`
between processes, `local` within one, for tests.
"""
