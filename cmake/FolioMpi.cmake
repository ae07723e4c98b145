# FOLIO_MPI: AUTO builds the library folio_mpi where CMake finds an MPI, ON insists on it, OFF does not look.
# Sets FOLIO_HAS_MPI and, where it is true, finds MPI::MPI_CXX.
include_guard(GLOBAL)
set(FOLIO_MPI AUTO CACHE STRING "Build the MPI process group: AUTO, ON or OFF")
set_property(CACHE FOLIO_MPI PROPERTY STRINGS AUTO ON OFF)
set(FOLIO_HAS_MPI OFF)
if(NOT FOLIO_MPI MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FOLIO_MPI is '${FOLIO_MPI}'; it takes AUTO, ON and OFF")
endif()
if(NOT FOLIO_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(FOLIO_HAS_MPI ON)
    message(STATUS "MPI ${MPI_CXX_VERSION}: ${MPIEXEC_EXECUTABLE}")
  elseif(FOLIO_MPI STREQUAL "ON")
    message(FATAL_ERROR "FOLIO_MPI is ON, but CMake finds no MPI: install one (libopenmpi-dev openmpi-bin), or use AUTO")
  else()
    message(STATUS "No MPI: the library folio_mpi is left out")
  endif()
endif()

if(FOLIO_HAS_MPI)
  # What starts a test as two processes, and in which environment. Containers often forbid what Open MPI's shared memory
  # would like best; it says so at length otherwise. Open MPI frees little of its own when it ends, which
  # AddressSanitizer would report as leaks.
  set(FOLIO_TWO_PROCESSES ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 2)
  execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE version ERROR_VARIABLE version)
  if(version MATCHES "Open MPI|OpenRTE")
    list(APPEND FOLIO_TWO_PROCESSES --allow-run-as-root --oversubscribe)
  endif()
  list(APPEND FOLIO_TWO_PROCESSES ${MPIEXEC_PREFLAGS})
  set(FOLIO_MPI_ENVIRONMENT OMPI_MCA_btl_vader_single_copy_mechanism=none PMIX_MCA_gds=hash ASAN_OPTIONS=detect_leaks=0)
endif()

# folio_mpi_test(NAME t SOURCES ...): a GoogleTest program with a main of its own, over the objects of every module that
# is there by now; run as one test of two processes, since mpirun cannot run its cases one by one.
function(folio_mpi_test)
  cmake_parse_arguments(T "" "NAME" "SOURCES" ${ARGN})
  get_property(modules GLOBAL PROPERTY FOLIO_MODULES)
  add_executable(${T_NAME} ${T_SOURCES})
  foreach(module IN LISTS modules)
    target_link_libraries(${T_NAME} PRIVATE $<TARGET_OBJECTS:${module}>)
  endforeach()
  target_link_libraries(${T_NAME} PRIVATE folio_options ${FOLIO_LINK_LIBRARIES} MPI::MPI_CXX GTest::gtest GTest::gmock
                        nlohmann_json::nlohmann_json)
  target_compile_definitions(${T_NAME} PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX FOLIO_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  folio_use_test_options(${T_NAME})
  add_test(NAME ${T_NAME} COMMAND ${FOLIO_TWO_PROCESSES} $<TARGET_FILE:${T_NAME}> ${MPIEXEC_POSTFLAGS})
  set_tests_properties(${T_NAME} PROPERTIES LABELS quick TIMEOUT 300 PROCESSORS 2
    ENVIRONMENT "${FOLIO_MPI_ENVIRONMENT}")
endfunction()
