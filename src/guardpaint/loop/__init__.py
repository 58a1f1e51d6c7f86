"""One guarded call: listen to the pipeline, audit its steps, repair, verify, reinsert, decide what is released."""
