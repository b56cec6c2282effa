"""The decisions of the rendezvous service, pure: no I/O, no clock, no randomness; standard library only.

A run is changed in one way only: a command or the passing of time yields *facts*, and the facts are folded
into the run's state.

    decide(state, command, now) -> facts     the meaning of a command, or a refusal
    next_consequence(state, now) -> fact     the next fact that is due without a command
    apply(state, fact, now) -> state         the fold

`execute` and `settle` put them together. Time is an argument, in seconds of the server's monotonic clock.
"""
