"""Draft: attach to the frozen base pipeline, see its steps, replay its denoiser, decode its views."""
