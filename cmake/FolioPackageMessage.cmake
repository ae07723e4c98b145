# What `pip install .` builds, why, and how to change it. The build backend (bindings/python/build_backend) shows these lines
# on the terminal.
include_guard(GLOBAL)
find_program(folio_nvcc nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)

function(folio_say)
  list(JOIN ARGN " " text)
  message(STATUS "folio-attention: ${text}")
endfunction()

if(FOLIO_HAS_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
  folio_say("building for CPUs and for NVIDIA GPUs of ${architectures} (FOLIO_CUDA=${FOLIO_CUDA}; CUDA"
    "${CMAKE_CUDA_COMPILER_VERSION} at ${CMAKE_CUDA_COMPILER}).")
  folio_say("The CUDA kernels take about 40 minutes of one core; FOLIO_CUDA=OFF leaves them out.")
else()
  if(FOLIO_CUDA STREQUAL "AUTO")
    folio_say("building for CPUs only (FOLIO_CUDA=AUTO, and there is no CUDA toolkit). It takes some minutes.")
  else()
    folio_say("building for CPUs only (FOLIO_CUDA=OFF, which is the default). It takes some minutes.")
  endif()
  if(folio_nvcc)
    folio_say("For NVIDIA GPUs too: FOLIO_CUDA=ON pip install . (nvcc is at ${folio_nvcc}).")
  else()
    folio_say("For NVIDIA GPUs too: install a CUDA toolkit, then FOLIO_CUDA=ON pip install . (there is no nvcc here).")
  endif()
endif()
folio_say("pip install -v . shows every step.")
