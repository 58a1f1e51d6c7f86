"""Published protocols as commands: prompt files, bases and judges in, the protocol's table out.

guardpaint eval protocol jailbreakdiffbench --data DIR --base sd15=PATH --guard DIR --judge vlm:MODEL --out runs/jdb

`spec` reads a protocol's YAML file, `suites` opens the prompt files, `plan` counts and times, `table` lays the results
out, and `command` runs it all.
"""
