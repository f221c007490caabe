"""Kill runs at random moments, and compare them bit for bit with one that nobody disturbed.

    python -m tests.train.chaos --trials 20 --kinds step,save,prefetch

A trial is a run of two ranks under `torchrun --max-restarts 3`, with pictures, a data worker per rank and
asynchronous checkpoints. The ranks are a ring; in every fourth trial pipeline stages, in another data ranks.
One to three times something is killed at a moment of the trial's kind:

- step: a rank, anywhere in a step
- save: a rank, while a checkpoint is written or published
- prefetch: a rank or its worker, while rows of steps to come are encoded
- eval: a rank, while it evaluates
- start: a rank, while it starts or resumes
- agent: torchrun and all ranks at once
- term, int, hup: nothing is killed, but torchrun gets SIGTERM, SIGINT, SIGHUP
- usr1: a rank gets SIGUSR1
- worker: a data worker is stopped (SIGSTOP), for ever
- shard: all is killed, and a file is missing from every checkpoint when the command is given again
- full: all is killed, and then no checkpoint can be written to the end
- twins: a second run in the same folder
- host: all is killed, the command is given on two hosts (network namespaces), and one of them is cut off in a
  step; skipped where there can be no namespaces

Torchrun starts the ranks again, or the command is given again, and the run goes on from its last checkpoint.
"""
