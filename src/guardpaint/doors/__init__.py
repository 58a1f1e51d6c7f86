"""The ways in: attach (a guarded twin), watch (your own object), comfy (a ComfyUI workflow)."""
