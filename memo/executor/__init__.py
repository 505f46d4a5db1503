"""Runs swap plans and state plans: streams and events, rounding buffers, host memory, and the engine that joins them.

Files:

activations    runtime.py (owns all memory), swapper.py (the engine), staging.py (records on a disk);
               in a sweep also key_values.py, section_stream.py and hidden_states.py
layers         layer.py (all tokens at once), sweep.py (section by section), resident.py (nothing moves),
               custom_layer.py (custom layers); layer_on_tiles.py and tile_machine.py run the operations of a tile
states         states.py (the engine), layer_states.py, state_buffers.py, state_slots.py
host memory    host_budget.py, host_pool.py, host_records.py; on a disk record_file.py
streams        streams.py (the interface), cuda_streams.py, cpu_streams.py, checker.py (finds races)
observers      recorder.py and work.py (times), phases.py (for memory plans)

Terms:

slot       a rounding buffer on the device: the activations of one layer, or one section of the layer
record     the moved prefix of a slot, in host memory or on a disk, between a forward and its backward
tile       a range of tokens on which a layer's token-wise operations run at once; tiles do not depend on any plan
section    a range of tokens, some whole tiles, that a slot holds if layers are swept along the sequence
"""
