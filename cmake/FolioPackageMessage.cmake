# What `pip install .` builds, why, and how to change it. The build backend (bindings/python/build_backend) shows these lines
# on the terminal. No semicolons: CMake would take them for lists.
include_guard(GLOBAL)

function(folio_say)
  list(JOIN ARGN " " text)
  message(STATUS "folio-attention: ${text}")
endfunction()

# How to ask for CUDA kernels here. CMake looks for nvcc in PATH and in CUDACXX.
function(folio_say_how_to_get_cuda)
  find_program(in_path nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  find_program(elsewhere nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  if(in_path)
    folio_say("For NVIDIA GPUs too: FOLIO_CUDA=ON pip install . (nvcc is at ${in_path}).")
  elseif(elsewhere)
    folio_say("For NVIDIA GPUs too: CUDACXX=${elsewhere} FOLIO_CUDA=ON pip install .")
  else()
    folio_say("For NVIDIA GPUs too: install a CUDA toolkit, then FOLIO_CUDA=ON pip install . (no nvcc was found).")
  endif()
endfunction()

if(FOLIO_HAS_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
  folio_say("building for CPUs and NVIDIA GPUs, architectures ${architectures}, as FOLIO_CUDA=${FOLIO_CUDA} asks"
    "(CUDA ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_COMPILER}).")
  folio_say("The CUDA kernels take about 40 minutes of one core. FOLIO_CUDA=OFF leaves them out.")
elseif(FOLIO_CUDA STREQUAL "AUTO")
  folio_say("building for CPUs only: FOLIO_CUDA=AUTO, and no CUDA compiler was found. It takes some minutes.")
  folio_say_how_to_get_cuda()
else()
  folio_say("building for CPUs only: FOLIO_CUDA=OFF, which is the default. It takes some minutes.")
  folio_say_how_to_get_cuda()
endif()
folio_say("pip install -v . shows every step.")
