"""Everything about TPUs: the device, hosts and slices of a Ray cluster, and the compiler without a chip.

Lower rooms reach this one by name alone: `devices.base.MODULES` names the device, `jobs.cluster.ROOMS` the
hosts. Who trains on no TPU never imports it.
"""
