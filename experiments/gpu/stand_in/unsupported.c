// What torch's libraries name and the stand-in does not do: every call says "not supported" (801).
#define NO(name) \
  int name(void) { return 801; }
NO(cuFuncGetAttribute) NO(cuFuncSetAttribute) NO(cuFuncSetCacheConfig) NO(cuLaunchCooperativeKernel) NO(cuLaunchKernel)
NO(cuLinkAddData_v2) NO(cuLinkComplete) NO(cuLinkCreate_v2) NO(cuModuleGetFunction) NO(cuModuleLoad) NO(cuModuleLoadData)
NO(cuModuleLoadDataEx) NO(cuModuleUnload) NO(cuOccupancyMaxActiveBlocksPerMultiprocessor) NO(cuPointerGetAttribute)
NO(cuTensorMapEncodeTiled)
NO(cudaDeviceEnablePeerAccess) NO(cudaDeviceGetDefaultMemPool) NO(cudaDeviceGetGraphMemAttribute)
NO(cudaDeviceSetGraphMemAttribute) NO(cudaFreeAsync) NO(cudaFuncSetAttribute) NO(cudaGetSymbolAddress) NO(cudaGraphAddNode)
NO(cudaGraphConditionalHandleCreate) NO(cudaGraphDebugDotPrint) NO(cudaGraphRetainUserObject) NO(cudaIpcCloseMemHandle)
NO(cudaIpcGetEventHandle) NO(cudaIpcGetMemHandle) NO(cudaIpcOpenEventHandle) NO(cudaIpcOpenMemHandle)
NO(cudaKernelSetAttributeForDevice) NO(cudaLaunchCooperativeKernel) NO(cudaLibraryGetKernel) NO(cudaLibraryLoadData) NO(cudaLibraryUnload) NO(cudaMallocAsync)
NO(cudaMemPoolGetAttribute) NO(cudaMemPoolSetAccess) NO(cudaMemPoolSetAttribute) NO(cudaMemPoolTrimTo) NO(cudaMemcpyToSymbol)
NO(cudaProfilerStart) NO(cudaProfilerStop) NO(cudaStreamBeginCaptureToGraph) NO(cudaStreamUpdateCaptureDependencies)
NO(cudaUserObjectCreate) NO(cudaUserObjectRelease)
