# Finds NVIDIA's NCCL: nccl.h and, beside it, libnccl.so.2. Looks under NCCL_ROOT, CMAKE_PREFIX_PATH, the system's and the CUDA
# toolkit's directories, and in the pip packages nvidia-nccl-cu13 and nvidia-nccl-cu12 of Python_EXECUTABLE or the Python in PATH.
# Sets NCCL_FOUND, NCCL_VERSION and NCCL_LIBRARY, which may be missing: Folio loads it at run time. Defines NCCL::headers.
find_program(NCCL_PYTHON NAMES ${Python_EXECUTABLE} python3 python DOC "Python interpreter whose packages are searched for NCCL")
mark_as_advanced(NCCL_PYTHON)
set(nccl_packages "")
if(NCCL_PYTHON AND NOT NCCL_INCLUDE_DIR)
  execute_process(COMMAND ${NCCL_PYTHON} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE nccl_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(nccl_packages)
    string(APPEND nccl_packages /nvidia/nccl)
  endif()
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} ${CUDAToolkit_ROOT} PATHS ${nccl_packages} ${CUDAToolkit_INCLUDE_DIRS}
  PATH_SUFFIXES include)
if(NCCL_INCLUDE_DIR)
  get_filename_component(nccl_prefix ${NCCL_INCLUDE_DIR} DIRECTORY)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h nccl_numbers REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" nccl_numbers "${nccl_numbers}")
  list(JOIN nccl_numbers "." NCCL_VERSION)
endif()
find_library(NCCL_LIBRARY NAMES libnccl.so.2 HINTS ${nccl_prefix} ${CUDAToolkit_LIBRARY_DIR} PATHS ${nccl_packages} PATH_SUFFIXES lib lib64)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
if(NCCL_FOUND AND NOT TARGET NCCL::headers)
  add_library(NCCL::headers INTERFACE IMPORTED)
  target_include_directories(NCCL::headers SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
endif()
