# FOLIO_BUILD_PYTHON: AUTO builds the Python module where a Python with nanobind is found, ON insists on it, OFF does not
# look. The Python is the one of scripts/install_deps.sh (build/python) where it is there, or Python_EXECUTABLE.
# Sets FOLIO_HAS_PYTHON.
include_guard(GLOBAL)
set(FOLIO_BUILD_PYTHON ${FOLIO_LOOKS} CACHE STRING "Build the Python module: AUTO, ON or OFF")
set_property(CACHE FOLIO_BUILD_PYTHON PROPERTY STRINGS AUTO ON OFF)
set(FOLIO_HAS_PYTHON OFF)
if(NOT FOLIO_BUILD_PYTHON MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FOLIO_BUILD_PYTHON is '${FOLIO_BUILD_PYTHON}'; it takes AUTO, ON and OFF")
endif()
if(FOLIO_BUILD_PYTHON STREQUAL "OFF")
  return()
endif()

set(folio_python_environment ${PROJECT_SOURCE_DIR}/build/python/bin/python)
if(NOT Python_EXECUTABLE AND EXISTS ${folio_python_environment})
  set(Python_EXECUTABLE ${folio_python_environment})
endif()
# SKBUILD_SABI_COMPONENT: scikit-build-core asks for the stable ABI (pyproject.toml, wheel.py-api).
find_package(Python 3.10 COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT} QUIET)
if(Python_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir OUTPUT_VARIABLE nanobind_ROOT
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(nanobind CONFIG QUIET)
endif()
if(nanobind_FOUND)
  set(FOLIO_HAS_PYTHON ON)
elseif(FOLIO_BUILD_PYTHON STREQUAL "ON")
  message(FATAL_ERROR "FOLIO_BUILD_PYTHON is ON, but there is no Python with its headers and nanobind: "
    "run scripts/install_deps.sh python, set Python_EXECUTABLE, or use AUTO")
else()
  message(STATUS "No Python with nanobind: the Python module is not built (scripts/install_deps.sh python installs it)")
endif()
