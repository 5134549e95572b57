"""The largest sizes that any format may name: far above every model of these families, and below what would let a lying
file make anyone allocate gigabytes."""

MAX_HIDDEN, MAX_INTERMEDIATE, MAX_VOCAB = 1 << 16, 1 << 18, 1 << 21
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_POSITIONS = 512, 512, 1024, 1 << 23
MAX_EXPERTS, MAX_USED_EXPERTS = 1 << 14, 256  # of all layers together; of a token
