# FOLIO_CUDA=EMULATED: device code is compiled for the host and runs on an emulated GPU (tests/emulation), so that every test
# of GPUs runs without one. Needs the toolkit's headers; for tests alone.
include_guard(GLOBAL)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  message(FATAL_ERROR "FOLIO_CUDA is EMULATED: the emulator switches fibers on x86-64 only")
endif()
if(FOLIO_INSTALL)
  message(FATAL_ERROR "FOLIO_CUDA is EMULATED, which is for tests: set FOLIO_INSTALL=OFF, as the preset emulated-gpu does")
endif()
find_package(CUDAToolkit REQUIRED)
set(FOLIO_HAS_CUDA ON)
set(FOLIO_CUDART folio_emulated_cudart)
set(emulation ${PROJECT_SOURCE_DIR}/tests/emulation)
set(FOLIO_EMULATED_CODE ${PROJECT_BINARY_DIR}/emulated)

add_library(folio_emulated_cudart SHARED ${emulation}/cuda_runtime.cc ${emulation}/emulated_barriers.cc
            ${emulation}/emulated_copies.cc ${emulation}/peer_memory.cc ${emulation}/runtime.cc ${emulation}/warp_emulator.cc)
target_compile_features(folio_emulated_cudart PUBLIC cxx_std_20)
target_include_directories(folio_emulated_cudart SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(folio_emulated_cudart PRIVATE Threads::Threads)
set_target_properties(folio_emulated_cudart PROPERTIES CXX_VISIBILITY_PRESET default VISIBILITY_INLINES_HIDDEN OFF)

# folio_emulate(FROM TO): device code as C++ for the host.
function(folio_emulate from to)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${from} ${PROJECT_SOURCE_DIR}/tests/emulation/device_code.sed)
  execute_process(COMMAND sed -E -f ${PROJECT_SOURCE_DIR}/tests/emulation/device_code.sed ${from}
                  OUTPUT_FILE ${to}.new COMMAND_ERROR_IS_FATAL ANY)
  configure_file(${to}.new ${to} COPYONLY)
endfunction()

# Headers with launches or kernels take the place of the original ones.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cuh)
foreach(header IN LISTS headers)
  file(STRINGS ${header} code REGEX "<<<|extern __shared__")
  if(code)
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/src ${header})
    get_filename_component(directory ${FOLIO_EMULATED_CODE}/${name} DIRECTORY)
    file(MAKE_DIRECTORY ${directory})
    folio_emulate(${header} ${FOLIO_EMULATED_CODE}/${name})
  endif()
endforeach()

# folio_emulated_sources(LIST): in the list of sources of this name, each .cu becomes a source of C++.
function(folio_emulated_sources list)
  set(sources "")
  foreach(source IN LISTS ${list})
    if(source MATCHES "[.]cu$")
      get_filename_component(name ${source} NAME_WE)
      get_filename_component(from ${source} ABSOLUTE)
      set(to ${CMAKE_CURRENT_BINARY_DIR}/${name}_emulated.cc)
      folio_emulate(${from} ${to})
      # Every rounding is the GPU's: no contraction, as src/ has none.
      set_source_files_properties(${to} PROPERTIES
        COMPILE_OPTIONS "-w;-Wno-psabi;-O1;-ffp-contract=off;-include;${PROJECT_SOURCE_DIR}/tests/emulation/kernel_launch.hpp")
      set(source ${to})
    endif()
    list(APPEND sources ${source})
  endforeach()
  set(${list} ${sources} PARENT_SCOPE)
endfunction()
