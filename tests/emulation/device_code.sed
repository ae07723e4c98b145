# Device code as C++ for the host: launches and dynamic shared memory (kernel_launch.hpp).
s/^( *)([^ ].*)<<<(.+)>>>\(/\1::folio::emulation::launch(\2, \3)(/
s/extern __shared__ (__align__\([0-9]+\) )?(.+) ([a-z]+)\[\];/auto* const \3 = reinterpret_cast<\2*>(::folio::emulation::shared_memory());/
