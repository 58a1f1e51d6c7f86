"""What is kept on disk: checkpoints, images, rows, results; and seeds, jobs and plug-ins, which everything may use."""
